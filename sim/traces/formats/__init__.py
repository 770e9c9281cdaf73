"""One file for each trace format. Importing this package registers them, in the order in which they are tried:
headers first, then the formats with fields of their own.
"""

from . import azure, burstgpt, vidur, qwen_bailian, agentic, sharegpt, request_log, mooncake  # noqa: F401, I001
