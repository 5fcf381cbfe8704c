"""What is run: training, evaluation, prediction, benchmarks and the command line."""
