"""Embedding tables inside a plain nn.Module: unbounded user ids, a shared item table, rows updated by backward."""

import torch

import unequal as uq

item, user = uq.Table("item", rows=1000, dim=16), uq.Table("user", dim=16)
features = {"history": uq.Feature(item, pooling="mean"), "target": uq.Feature(item), "user": uq.Feature(user)}
rows = uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.1))
model = torch.nn.ModuleDict({"rows": rows, "top": torch.nn.Linear(48, 1)})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(200):
    target, users = torch.randint(1000, (256,)), torch.randint(2**60, (50,)).repeat(6)[:256]
    history = uq.Jagged(torch.randint(1000, (256 * 5,)), torch.full((256,), 5))
    logits = model["top"](model["rows"]({"history": history, "target": target, "user": users}).pooled).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, (target % 2).float())
    optimizer.zero_grad(), loss.backward(), optimizer.step()
print(f"loss {loss:.3f}")
