"""Dispatch and combine between GPUs of one host: kernels that write into each other's memory. Needs torch and a driver.

Nothing here is imported before a group is opened for a GPU.
"""
