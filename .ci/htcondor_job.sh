# Brings up HTCondor on this host, which has nothing else, and runs a job in it. For .ci/frameworks, as root.
printf '127.0.0.1 localhost condorhost\n' >/etc/hosts
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
export PYTHONPATH=/safe_gpu SAFE_GPU_DRIVER=simulated:dgx-a100

# HTCondor simulates GPUs; they get the UUIDs of the host that safe_gpu simulates.
names=(a0223334 b1223334 c2223334 d3223334 e4223334 f5223334 06223334 17223334)
mapfile -t own < <(python3 -c 'from safe_gpu.drivers import open_driver
for gpu in open_driver().snapshot().gpus: print(gpu.uuid[4:12])')
{
  printf '#!/bin/sh\nexec /usr/libexec/condor/condor_gpu_discovery "$@" | sed "'
  for number in "${!names[@]}"; do printf 's/%s/%s/g;' "${names[number]}" "${own[number]}"; done
  printf '"\n'
} >/usr/local/bin/discovery
chmod +x /usr/local/bin/discovery

cat >/etc/condor/config.d/99-test.config <<'C'
CONDOR_HOST = 127.0.0.1
NETWORK_INTERFACE = 127.0.0.1
NO_DNS = True
DEFAULT_DOMAIN_NAME = test
UID_DOMAIN = test
TRUST_UID_DOMAIN = True
SOFT_UID_DOMAIN = True
DAEMON_LIST = MASTER, COLLECTOR, NEGOTIATOR, SCHEDD, STARTD
use SECURITY : HOST_BASED
ALLOW_WRITE = *
ALLOW_READ = *
ALLOW_DAEMON = *
ALLOW_ADMINISTRATOR = *
ALLOW_NEGOTIATOR = *
START = True
RunBenchmarks = False
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_CYCLE_DELAY = 1
SCHEDD_INTERVAL = 2
UPDATE_INTERVAL = 5
use FEATURE : GPUs
MACHINE_RESOURCE_INVENTORY_GPUs = /usr/local/bin/discovery -simulate:4,8 -properties
use FEATURE : PartitionableSlot
C
condor_master
for _ in $(seq 120); do
  condor_status -af DetectedGPUs 2>/dev/null | grep GPU && break
  sleep 0.5
done

cd /home/someone
cat >job.sh <<'J'
export PYTHONPATH=/safe_gpu SAFE_GPU_DRIVER=simulated:dgx-a100
echo "HTCondor gave $CUDA_VISIBLE_DEVICES, assigned <${_CONDOR_AssignedGPUs-}>"
exec python3 -m safe_gpu run -n job -- sh -c 'echo "claimed $CUDA_VISIBLE_DEVICES"; python3 -m safe_gpu status'
J
cat >submit <<'S'
executable = /bin/sh
arguments = /home/someone/job.sh
output = out
error = err
log = log
request_gpus = 2
request_memory = 10
request_disk = 1
queue
S
sed '/^request_gpus/d; s/^\(output\|error\|log\) = .*/&.none/' submit >submit.none # a job that asks for no GPU
chown -R someone: .
su someone -c 'condor_submit submit && condor_wait -wait 60 log' || cat log
su someone -c 'condor_submit submit.none && condor_wait -wait 60 log.none' || cat log.none
cat out err out.none err.none
grep -q '^claimed $' out.none
grep -q 'starts without a GPU: job htcondor:2.0 asked for no GPU' err.none
grep -Eq '^claimed [0-7],[0-7]$' out
grep -q 'htcondor:\|1\.0' out
