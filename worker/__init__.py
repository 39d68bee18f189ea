"""The worker's room: leases shards, feeds the engine, seals and commits results.

It is the one room that knows both jobs and engine, and it translates between them: neither may know the
other, and neither knows this one. Start reading at main.py; README.md gives the order.
"""
