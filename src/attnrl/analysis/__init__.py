"""Reads run directories, and nothing else: what a run left on disk is enough to redraw every figure."""

from attnrl.analysis.report import build_report, write_report

__all__ = ["build_report", "write_report"]
