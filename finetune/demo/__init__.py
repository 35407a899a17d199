"""The web page of `finetune demo`, and its export as a Hugging Face Space."""
