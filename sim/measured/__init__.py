"""Measured servers: tables of serving points and runs request by request, beside what the simulation says of them."""
