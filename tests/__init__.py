"""The tests, as a package so that they share cases.py and oracle.py."""
