"""One HTML page about runs: logged.py reads curves and images, charts.py draws, page.py fills the template."""
