#!/bin/sh
# A snapshot of each master, checked before it counts: redis-backup.sh FOLDER KEEP URL...
#
# FOLDER gets HOST-TIME.rdb for each; the KEEP latest of each host stay. A URL of a replica is passed over. Nothing has to
# stop: a snapshot costs a fork of Redis.
set -eu
umask 077
folder=$1
keep=$2
shift 2
saved=0
for url in "$@"; do
  role=$(redis-cli -u "$url" role | head -n 1)
  [ "$role" = master ] || continue
  place=${url##*@}
  place=${place##*://}
  host=$(echo "$place" | tr -c 'A-Za-z0-9\n' '-')
  file="$folder/$host-$(date -u +%Y%m%dT%H%M%SZ).rdb"
  redis-cli -u "$url" --rdb "$file.part"
  redis-check-rdb "$file.part"
  mv "$file.part" "$file"
  saved=$((saved + 1))
  find "$folder" -name "$host-*.rdb" | sort | head -n "-$keep" | while read -r old; do rm "$old"; done
done
[ "$saved" -gt 0 ] || { echo "no master answered" >&2; exit 1; }
echo "saved $saved"
