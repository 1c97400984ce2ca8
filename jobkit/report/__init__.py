"""One HTML page about runs: logged.py reads curves and images, charts.py draws, page.py fills the template.
Nothing here changes a run, or loads anything from the network."""
