"""Committed steps and evaluations, logged to files, TensorBoard, Weights & Biases and MLflow."""
