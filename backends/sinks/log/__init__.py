"""The durable event log: Arrow streams while a segment is open, Parquet once it is closed, under one manifest."""
