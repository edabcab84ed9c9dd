"""What the scripts beside this package measure, judge and draw; `paramstore bench` runs none of it."""
