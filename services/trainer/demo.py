"""The whole loop in one command: `worldserve demo`. (In work by the demo/report helper since 06:58.)"""
