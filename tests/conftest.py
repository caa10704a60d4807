from hypothesis import HealthCheck, settings

from tests.browser import browser, page

__all__ = ["browser", "page"]

# A busy machine is slow, and no example is wrong for it.
settings.register_profile("qkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qkv")
