"""One run, and everything that happens while it runs; the three ways in are `run`, `lightning` and `plain_loop`."""
