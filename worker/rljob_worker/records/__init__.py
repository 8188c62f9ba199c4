"""Files that a run leaves behind: step records, trajectories, summary, TensorBoard, and the HTTP view of them."""
