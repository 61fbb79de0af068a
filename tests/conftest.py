"""Where SUMO cannot be loaded (a bare container), what needs it is skipped, with the reason."""

import re

import pytest

from envs.sumo import import_libsumo

NEEDS_SUMO = re.compile("sumo|grid|bottleneck|test_counting_the_costs", re.IGNORECASE)


def pytest_collection_modifyitems(items):
    try:
        import_libsumo()
    except ImportError as error:
        for item in items:
            if NEEDS_SUMO.search(item.name):
                item.add_marker(pytest.mark.skip(reason=str(error)))
