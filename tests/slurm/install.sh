#!/bin/sh
# Make sure that there is a Slurm to test with: the distribution's, if it may be installed; else say what is missing.
# Nothing is started: the tests start daemons of their own, on free ports, in folders of their own.
PATH="$PATH:/usr/sbin:/usr/local/sbin"
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null && exit 0

refuse() {
    echo "test-slurm: $1" >&2
    echo "test-slurm: on Debian and Ubuntu, 'apt-get install --no-install-recommends slurm-wlm' is all it needs" >&2
    exit 1
}
command -v apt-get >/dev/null || refuse "there is no Slurm here, and no apt-get to install it with"
if [ "$(id -u)" = 0 ]; then
    as_root=
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    refuse "there is no Slurm here, and installing it needs root (or sudo without a password)"
fi
echo "test-slurm: installing slurm-wlm" >&2
export DEBIAN_FRONTEND=noninteractive
install="$as_root apt-get install -y -q --no-install-recommends slurm-wlm"
$install >/dev/null || { $as_root apt-get update -q >/dev/null && $install >/dev/null; } || refuse "slurm-wlm could not be installed"
