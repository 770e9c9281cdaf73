"""`kvledger log` where pyarrow is not installed: every sub-command says what to install, and shows its options."""

import json
import subprocess
import sys

from kvledger.sim.commands.log import build_log_app

PROGRAM = """
import json, sys
sys.modules["pyarrow"] = None
from kvledger.sim.commands.cli import main
ended = {}
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["kvledger", "log", *arguments]
    try:
        main()
    except SystemExit as end:
        ended[arguments[0]] = end.code
print(json.dumps(ended))
"""
NEEDED_ARGUMENTS = {"diff": ["other.log"], "at": ["--commit", "0"], "convert": ["rows.jsonl", "--to", "jsonl"]}


def without_pyarrow(commands: list[list[str]]) -> tuple[dict[str, int], list[str]]:
    """How each of these ends in an interpreter that cannot import pyarrow, and what they say on standard error."""
    call = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    ended = subprocess.run(call, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr.splitlines()


def test_every_command_on_logs_says_what_to_install():
    names = [command.name for command in build_log_app().registered_commands]
    codes, errors = without_pyarrow([[name, "run.log", *NEEDED_ARGUMENTS.get(name, [])] for name in names])
    assert codes == dict.fromkeys(names, 2)
    assert errors == ["kvledger: event logs need pyarrow: pip install 'kvledger[log]'"] * len(names)


def test_help_on_logs_needs_nothing():
    codes, errors = without_pyarrow([["verify", "--help"], ["show", "--help"]])
    assert codes == {"verify": 0, "show": 0}
    assert not errors
