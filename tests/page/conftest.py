from tests.page.jupyter import lab
from tests.page.live import live

__all__ = ["lab", "live"]
