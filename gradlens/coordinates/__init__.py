"""Whether layers keep their size when networks are made wider."""
