"""What differs between CPU, CUDA, AWS Trainium and other accelerators, stated once."""
