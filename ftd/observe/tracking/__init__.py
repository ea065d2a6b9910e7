"""Logs committed steps and evaluations to a file, TensorBoard, Weights & Biases and MLflow."""
