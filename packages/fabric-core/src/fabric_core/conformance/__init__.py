"""The conformance kit: every contract of fabric-core as a test that any backend can be put to.

    pytest --pyargs fabric_core.conformance --fabric-backend local
    pytest --pyargs fabric_core.conformance --fabric-backend mine --fabric-import my_package.backend --fabric-nics 1

It needs pytest, hypothesis and numpy. `plugin.py` holds the options (pytest finds it by entry point), `conftest.py` the
fixtures, `peer.py` the program that plays the other side in a process of its own. The tests see a backend only through
`TransferEngine`: what is checked is what a user would notice.

Names of test files: test_cNN_*.py for contract NN, test_verbs_*.py for one verb of the API.
"""
