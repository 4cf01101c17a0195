from transformers.utils import logging as logging
