"""xmc: extreme multi-label text classification on Ray, from thousands to millions of labels."""
