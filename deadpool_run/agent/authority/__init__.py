"""External authorities that record who leads a run (shared folder, etcd, Kubernetes). Spec, cluster and the command line import it."""
