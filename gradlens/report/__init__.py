"""A run, or several, as one page for a browser: a file, or live while it is being written."""

try:
    import bokeh  # noqa: F401
except ImportError as error:
    raise ImportError("a report is drawn with bokeh: pip install 'gradlens[report]'") from error
