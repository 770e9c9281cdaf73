"""Files by trace format. Importing this package registers the formats, in the order in which they are tried: headers
first, then the formats with fields of their own.
"""

from . import csv_files, qwen_bailian, agentic, sharegpt, otel_spans, request_log, sessions, mooncake  # noqa: F401, I001
