{{/* What all services read. */}}
{{- define "quire.config" -}}
{{- $prefix := include "quire.prefix" . }}
{{- $data := dict
  "QUIRE_REDIS_URL" (.Values.redis.url | default (printf "redis://%s-redis:6379/0" $prefix))
  "QUIRE_ORCHESTRATOR_ADDRESS" (printf "%s-orchestrator:7411" $prefix)
  "QUIRE_STORAGE_OBJECT_URL" .Values.objects.url
  "QUIRE_GATEWAY_OBJECT_URL" .Values.objects.url
  "QUIRE_GATEWAY_AUTH" .Values.auth
  "QUIRE_GATEWAY_CONNECTION_AGE_S" "600"
  "QUIRE_SCHEDULER_LINKS" .Values.links
  "QUIRE_ORCHESTRATOR_DRAIN_S" "5"
  "QUIRE_GATEWAY_DRAIN_S" "5"
  "QUIRE_STORAGE_DRAIN_S" "5"
  "QUIRE_DECODER_DRAIN_S" "5"
  "QUIRE_SCHEDULER_DRAIN_S" "1"
  "QUIRE_STORAGE_STOP_GRACE_S" "30"
  "QUIRE_GATEWAY_STOP_GRACE_S" "25"
  "UCX_TLS" "tcp,self"
  "UCX_NET_DEVICES" "eth0"
  "UCX_TCP_PORT_RANGE" "20000-20999"
}}
{{- $schedulers := list }}
{{- range $index := until (int .Values.scheduler.replicas) }}
{{- $schedulers = append $schedulers (printf "%s-scheduler-%d.%s-scheduler:7414" $prefix $index $prefix) }}
{{- end }}
{{- $_ := set $data "QUIRE_SCHEDULER_ADDRESS" ($schedulers | join ",") }}
{{- if .Values.redis.cluster }}
{{- $nodes := list }}
{{- range $index := until 3 }}
{{- $nodes = append $nodes (printf "%s-redis-%d.%s-redis:6379" $prefix $index $prefix) }}
{{- end }}
{{- $_ := set $data "QUIRE_REDIS_URL" (printf "redis+cluster://%s" ($nodes | join ",")) }}
{{- end }}
{{- with .Values.objects.endpoint }}
{{- $_ := set $data "AWS_ENDPOINT_URL" . }}
{{- end }}
{{- if .Values.rdma.enabled }}
{{- $_ := set $data "UCX_TLS" "rc,ud,sm,self" }}
{{- $_ := set $data "UCX_NET_DEVICES" "all" }}
{{- $_ := set $data "QUIRE_STORAGE_HUGE_PAGES" "true" }}
{{- end }}
{{- if .Values.sharedMemory.enabled }}
{{- $_ := set $data "QUIRE_SHARED_MEMORY" "/run/quire" }}
{{- $_ := set $data "QUIRE_SHARED_MEMORY_UIDS" "0" }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- $_ := set $data "QUIRE_CLUSTER_CA" "/etc/quire/certs/ca.crt" }}
{{- $_ := set $data "QUIRE_CLUSTER_CERT" "/etc/quire/certs/tls.crt" }}
{{- $_ := set $data "QUIRE_CLUSTER_KEY" "/etc/quire/certs/tls.key" }}
{{- $_ := set $data "QUIRE_GATEWAY_TLS_LISTEN" (printf "%s:7443" (include "quire.any" .)) }}
{{- $_ := set $data "QUIRE_GATEWAY_HTTP_TLS_LISTEN" (printf "%s:7444" (include "quire.any" .)) }}
{{- $_ := set $data "QUIRE_GATEWAY_S3_TLS_LISTEN" (printf "%s:7445" (include "quire.any" .)) }}
{{- $_ := set $data "QUIRE_GATEWAY_TLS_CERT" "/etc/quire/public/tls.crt" }}
{{- $_ := set $data "QUIRE_GATEWAY_TLS_KEY" "/etc/quire/public/tls.key" }}
{{- end }}
{{- range $name, $value := .Values.config }}
{{- $_ := set $data $name ($value | toString) }}
{{- end }}
{{- toYaml $data }}
{{- end }}
