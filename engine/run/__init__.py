"""Runs batches: the only room that holds weights and memory and calls the decoder.

It may not decide what runs; that is engine/schedule.
"""
