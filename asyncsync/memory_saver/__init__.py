"""What torch_memory_saver is asked, and what is read of the memory that it takes away."""
