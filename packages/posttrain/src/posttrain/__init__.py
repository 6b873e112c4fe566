"""Post-training of language models on CPU, CUDA and AWS Trainium, from parts that are useful alone."""
