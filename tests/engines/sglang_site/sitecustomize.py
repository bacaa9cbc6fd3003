"""On PYTHONPATH, for each process of an SGLang: what it imports and is not here."""

from tests.engines import stubs

stubs.install()
