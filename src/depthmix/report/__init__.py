"""Reports of runs and studies: what they have saved, measured further, as one HTML page that works offline."""

from depthmix.report.document import make_document, open_folders
from depthmix.report.page import write_page

__all__ = ["make_document", "open_folders", "write_page"]
