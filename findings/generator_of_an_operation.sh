#!/bin/sh
# torch 2.13.0: a generator reaches a TorchDispatchMode, or a kernel in Python, as another Python object than the program's.
#
# A tensor keeps its Python object through the dispatcher, so one expects `kwargs["generator"] is generator` in a mode that
# watches random operations. It is false for torch.Generator() and for torch.default_generator: the operation's object is
# a new one, which is not equal to the program's and has another hash, though both draw from one state (`_cdata` is
# equal). So a dict, a set or a WeakKeyDictionary of generators never finds the program's. A clone made by
# Generator.clone_state() is the same object on both sides, since torch itself makes its Python object.
#
# Seen on 2026-11-29 (the output after installation):
#   torch 2.13.0
#   torch.Generator(): same object False, equal False, same state True, found in a dict False
#   torch.default_generator: same object False, equal False, same state True, found in a dict False
#   torch.Generator().clone_state(): same object True, equal True, same state True, found in a dict True
#
# Meshwright is not used; its mw.sampling_generator returns such a clone. Run: sh findings/generator_of_an_operation.sh.
# It installs 1 GB in a temporary folder, and exits with 1 if the output is another.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" torch==2.13.0 numpy
cat > "$folder/generators.py" <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(kwargs["generator"])
        return func(*args, **kwargs)


print("torch", torch.__version__.partition("+")[0])
made = {
    "torch.Generator()": torch.Generator(),
    "torch.default_generator": torch.default_generator,
    "torch.Generator().clone_state()": torch.Generator().clone_state(),
}
for name, generator in made.items():
    seen = []
    x = torch.empty(3)
    with Watch():
        x.uniform_(generator=generator)
    same, equal, state = seen[0] is generator, seen[0] == generator, seen[0]._cdata == generator._cdata
    names = {generator: "kept"}
    print(f"{name}: same object {same}, equal {equal}, same state {state}, found in a dict {seen[0] in names}")
PYTHON
PYTHONPATH="$folder/packages" python3 "$folder/generators.py" 2> /dev/null | tee "$folder/output"
sed -n 's/^#   //p' "$0" > "$folder/expected"
cmp "$folder/expected" "$folder/output"
