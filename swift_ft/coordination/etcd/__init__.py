"""etcd v3 as the rendezvous store: a cluster that outlives its machines and keeps strangers out."""
