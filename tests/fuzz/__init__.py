"""Random cases: models, layouts, data and events of a training that nobody chose, compared with transformers."""
