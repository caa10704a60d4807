from tests.browser import browser, page

__all__ = ["browser", "page"]
