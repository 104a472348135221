"""One self-contained HTML page about a run: `worldserve report RUN`. (In work by the demo/report helper since 06:58.)"""
