"""One call or more of each operation, which the build runs on every kind of container.

`td` has batch size [3, 4] and the entries `a` of shape [3, 4, 2] and `("b", "c")` of shape [3, 4], of floats that are
not zero; `other` is a TensorDict of equal structure; `path` does not exist, and `saved` is a save. The build runs an
operation without a line here without arguments.
"""

from __future__ import annotations

# The calls of each family as lines, by the name of its class.
CALLS = {
    "Applying": """
        td.apply(torch.sqrt)
        td.apply_(torch.sqrt_)
        td.named_apply(lambda name, leaf: leaf + 1)
    """,
    "Arithmetic": """
        td + 1
        td.add_(1)
        td.add(other)
        td.sub(1)
        td.sub_(1)
        td.rsub(1)
        td.mul(other)
        td.mul_(2)
        td.div(2)
        td.div_(2)
        td.mod(2)
        td.pow(2)
        td.pow_(2)
        td.addcdiv(other, other)
        td.addcdiv_(other, other)
        td.addcmul(other, other)
        td.addcmul_(other, other)
        td.lerp(other, 0.5)
        td.lerp_(other, 0.5)
        td.clamp(0.2, 0.4)
        td.clamp_min(0.2)
        td.clamp_min_(0.2)
        td.clamp_max(0.2)
        td.clamp_max_(0.2)
        td.maximum(other)
        td.maximum_(other)
        td.minimum(other)
        td.minimum_(other)
        td == other
        td.logical_and(other)
        td.int().bitwise_and(1)
    """,
    "Autograd": """
        td.data
        td.grad
        td.requires_grad
        td.detach()
        td.detach_()
        td.clone().requires_grad_()
        td.clone().requires_grad_().sum(reduce=True).backward()
        td.zero_grad()
    """,
    "Casting": """
        td.to("cpu")
        td.to("meta")
        td.to(torch.float32)
        td.to(torch.float64)
        td.type(torch.float64)
        td.device
        td.dtype
    """,
    "Checkpointing": """
        td.state_dict()
        td.load_state_dict(other.state_dict())
        td.to_safetensors(path)
    """,
    "Consolidating": """
        td.consolidate()
        td.consolidate(path)
        td.is_consolidated()
    """,
    "Converting": """
        td.to_tensordict()
        td.to_dict()
        td.from_dict_instance({"x": torch.ones(3, 4)})
        td.select("a").numpy()
        td.tolist()
    """,
    "Copying": """
        td.clone()
        td.clone(recurse=False)
        td.copy()
    """,
    "Describing": """
        td.attrs()
        td.describe()
    """,
    "Factories": """
        td.new_zeros(2)
        td.new_ones(2)
        td.new_empty(2)
        td.new_full((2,), 0.5)
        td.new_tensor(other)
        td.fill_("a", 0.0)
        td.zero_()
    """,
    "Foreign": """
        td.to_namedtuple()
        td.to_pytree()
        td.select("a").to_struct_array()
        td.select("b").cat_from_tensordict(0)
        td.select("b").stack_from_tensordict(0)
    """,
    "RowChoice": """
        td.allclose(other)
        td.filter(lambda rows: rows["a"].reshape(3, -1).sum(1) > 0)
        td.head(2)
        td.sample(2)
    """,
    "Gathering": """
        td.gather(0, torch.zeros(2, 4, dtype=torch.int64))
        td.masked_select(torch.ones(3, 4, dtype=torch.bool))
        td.masked_fill(torch.ones(3, 4, dtype=torch.bool), 0.0)
        td.masked_fill_(torch.ones(3, 4, dtype=torch.bool), 0.0)
        td.where(torch.ones(3, 4, dtype=torch.bool), other)
    """,
    "Indexing": """
        td[0]
        td[1:]
        td[..., 0]
        td[:, None]
        td[[0, 2]]
        td[torch.tensor([0, 2])]
        td[torch.ones(3, 4, dtype=torch.bool)]
        td["a"]
        td["b", "c"]
        td["b"]
        list(td)
        td.copy_at_(other[0], 0)
        td.set_at_("a", 0.0, 0)
        td.update_at_(other[0], 0)
    """,
    "Modules": """
        td.to_module(module)
    """,
    "Naming": """
        td.names
        td.refine_names("time", "env")
        td.rename("time", "env")
        td.rename_("time", "env")
    """,
    "Padding": """
        td.pad([0, 1, 0, 0])
        td.to_padded_tensor()
    """,
    "Packing": """
        td.pack()[0]
    """,
    "Persisting": """
        td.to_h5(path)
        td.to_zarr(path)
    """,
    "Reading": """
        td.get("a")
        td.get(("b", "c"))
        td.get("b")
        td.get_at("a", 0)
        td.get_item_shape("a")
        td.entry_class("a")
        td.values(True, True)
        td.items()
        td.keys()
    """,
    "Reducing": """
        td.sum()
        td.sum(dim=0)
        td.sum(reduce=True)
        td.mean(dim=0)
        td.prod(dim=0)
        td.std(dim=0)
        td.var(dim=0)
        td.nansum(dim=0)
        td.nanmean(dim=0)
        td.min(dim=0)
        td.max(dim=0)
        td.amin(dim=0)
        td.amax(dim=0)
        td.all(dim=0)
        td.any(dim=0)
        td.cummin(0)
        td.cummax(0)
        td.softmax(0)
        td.logsumexp(0)
        td.quantile(0.5, 0)
        td.norm()
    """,
    "Saving": """
        td.memmap(path)
        td.memmap_(path)
        td.memmap_()
        td.memmap_like(path)
        td.save(path)
        td.dumps(path)
        td.load_(saved)
        td.load_memmap_(saved)
        td.is_memmap()
        td.saved_path
    """,
    "Adding": """
        td.make_memmap("x", (3, 4))
        td.make_memmap_from_tensor("x", torch.ones(3, 4))
    """,
    "Shape": """
        td.view(12)
        td.view(torch.int32)
        td.reshape(12)
        td.flatten(0, 1)
        td.unflatten(1, (2, 2))
        td.permute(1, 0)
        td.transpose(0, 1)
        td.swapaxes(0, 1)
        td.swapdims(0, 1)
        td.movedim(0, 1)
        td.moveaxis(0, 1)
        td.squeeze()
        td.unsqueeze(0)
        td.expand(2, 3, 4)
        td.expand_as(torch.zeros(2, 3, 4))
        td.broadcast_to((2, 3, 4))
        td.narrow(0, 1, 2)
        td.repeat(2, 1)
        td.repeat_interleave(2, dim=0)
        td.tile((2, 1))
        td.flip(0)
        td.roll(1, 0)
    """,
    "Sizing": """
        td.batch_size
        td.size()
        td.auto_batch_size_(1)
    """,
    "Stacking": """
        td.split(2)
        td.chunk(2)
        td.tensor_split(2)
        td.unbind(0)
        TensorDict.stack([td, td])
        TensorDict.cat([td, td])
        TensorDict.lazy_stack([td, td])
        TensorDict.maybe_dense_stack([td, td])
        td.densify()
        td.to_lazystack(0)
        td.stack_tensors("a", out_key="x", dim=2)
        td.cat_tensors("a", out_key="x", dim=2)
    """,
    "Structure": """
        td.select("a")
        td.select("a", inplace=True)
        td.exclude("a")
        td.exclude("a", inplace=True)
        td.flatten_keys()
        td.flatten_keys().unflatten_keys()
        td.split_keys(["a"])
        td.separates("a")
        td.rename_keys({"a": "x"})
        td.replace(a=torch.ones(3, 4))
    """,
    "TableFiles": """
        td[0].select("b").to_csv(path, separator=".")
        td[0].to_json(path)
    """,
    "Tables": """
        td[0].to_arrow()
        td[0].to_pandas(separator=".")
        td[0].to_polars()
        td[0].to_parquet(path)
    """,
    "Values": """
        td.set_non_tensor("x", "text")
        td.get_non_tensor("a")
        td.is_non_tensor("a")
        td.non_tensor_items()
        td.filter_non_tensor_data()
    """,
    "Writing": """
        td.set("a", torch.ones(3, 4, 2))
        td.set("a", torch.ones(3, 4, 2), inplace=True)
        td.set_("a", torch.ones(3, 4, 2))
        td.setdefault("x", torch.ones(3, 4))
        td.update(other)
        td.update(other, inplace=True)
        td.update_(other)
        td.copy_(other)
        td.create_nested("x")
        td.rename_key_("a", "x")
        td.del_("a")
        td.pop("a")
        td.popitem()
        td.clear()
    """,
}

# Operations that the build does not run, by the reason.
LEFT_OUT = {
    "in worker processes": "map map_iter",
    "with a number or a value for each row": "sort_by where_value",
    "between processes": "all_gather all_reduce arecv asend broadcast from_remote_init gather_and_stack init_remote "
    "irecv isend recv reduce scatter send",
    "on a server": "to_store",
    "on an accelerator": "cuda pin_memory pin_memory_ record_stream",
    "on quantized tensors": "qint32 qint8 quint4x2 quint8",
    "needs a library of its own": "to_hf to_mds",
    "with a storage of the caller": "make_memmap_from_storage",
}
