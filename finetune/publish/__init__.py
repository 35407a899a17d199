"""Write the model card and its artifacts, and push them to the Hugging Face Hub."""
