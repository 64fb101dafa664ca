"""External authorities that record who leads a run: shared folder, etcd, Kubernetes."""
