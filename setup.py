"""The packages: the repository's own folder is `kvledger`, and every folder of modules below it is found."""

from setuptools import find_packages, setup

TOP = ("core", "backends", "kernels", "sim")
INSIDE = find_packages(include=[*TOP, *(f"{name}.*" for name in TOP)])

setup(
    packages=["kvledger", *(f"kvledger.{name}" for name in INSIDE), "kvledger.testing", "kvledger.vllm"],
    package_dir={
        "kvledger": ".",
        "kvledger.testing": "tests/kit",
        "kvledger.vllm": "backends/vllm/short_name",
        **{f"kvledger.{name}": name.replace(".", "/") for name in INSIDE},
    },
)
