#!/bin/sh
# One node of a Redis Cluster: start.sh ITS-HOST HOST... (all of them, itself too; the first founds the cluster).
#
# Founding waits for all. Later a node whose address has changed makes itself known again, and one that has lost its
# folder becomes a replica of the master that has fewest. Clients are told host names, which stay what they are.
# MAXMEMORY: what it may hold; 0 for no limit.
set -eu
me=$1
shift
first=$1
port=6379

field() { redis-cli -h "$1" -p "$port" cluster info 2>/dev/null | tr -d '\r' | sed -n "s/^$2://p"; }
address() { getent hosts "$1" | awk '{print $1; exit}'; }

# Of the masters that have slots and live, the one with fewest replicas.
poorest() {
  redis-cli -p "$port" cluster nodes | awk '
    $3 ~ /fail/ {next}
    $3 ~ /master/ && NF > 8 {replicas[$1] += 0; master[$1] = 1}
    $3 ~ /slave/ {replicas[$4]++}
    END {for (id in master) if (!best || replicas[id] < replicas[best]) best = id; print best}'
}

found() {
  nodes=
  for host in "$@"; do
    [ "$(field "$host" cluster_slots_assigned)" = 0 ] || return 0
    nodes="$nodes $(address "$host"):$port"
  done
  # shellcheck disable=SC2086
  redis-cli --cluster create $nodes --cluster-replicas 1 --cluster-yes
}

keep() {
  while sleep 2; do
    slots=$(field 127.0.0.1 cluster_slots_assigned)
    [ -n "$slots" ] || continue
    if [ "$slots" = 0 ]; then
      other=
      for host in "$@"; do
        theirs=$(field "$host" cluster_slots_assigned)
        [ "${theirs:-0}" = 0 ] || other=$host
      done
      if [ -n "$other" ]; then
        redis-cli -p "$port" cluster meet "$(address "$other")" "$port" || true
      elif [ "$me" = "$first" ]; then
        found "$@" || true
      fi
    elif redis-cli -p "$port" cluster nodes | grep myself,master | awk 'NF > 8 {exit 1}'; then
      redis-cli -p "$port" cluster replicate "$(poorest)" || true
    elif redis-cli -p "$port" cluster nodes | grep -q fail; then
      for host in "$@"; do
        there=$(address "$host") && redis-cli -p "$port" cluster meet "$there" "$port" >/dev/null || true
      done
      sleep 10
    fi
  done
}

keep "$@" &
exec redis-server --port "$port" --dir /data --protected-mode no --appendonly yes --appendfsync always \
  --maxmemory "${MAXMEMORY:-0}" --maxmemory-policy noeviction \
  --cluster-enabled yes --cluster-config-file nodes.conf --cluster-node-timeout 5000 \
  --cluster-announce-hostname "$me" --cluster-preferred-endpoint-type hostname
