"""Files as one device has them: safetensors of whole weights, and the state of an optimizer.

safetensors_file.py   the format: rows that a rank owns     weight_files.py     a checkpoint of such files
save_pretrained.py    ``model.save_pretrained``             streamed_files.py   one gathered tensor at a time
rank_optimizer.py, optimizer_state.py, optimizer_manifest.py   what a rank has of an optimizer, under one-device names;
                      its checks and its restoring; all of it but the tensors
stock_optimizer.py    ``torch.save(optimizer.state_dict())``  whole_tensors.py  gathers on rank 0
published_form.py     where transformers publishes other tensors than the model has
"""
