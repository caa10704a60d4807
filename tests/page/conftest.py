from tests.page.jupyter import lab

__all__ = ["lab"]
