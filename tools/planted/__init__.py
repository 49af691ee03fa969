"""Bugs planted into copies of the C engine, and the tests that must find them (R13): `python tools/planted --help`."""
