{{/* Names and labels. */}}
{{- define "halfserve.name" -}}
{{- if contains "halfserve" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-halfserve" .Release.Name }}{{ end }}
{{- end }}

{{- define "halfserve.selector" -}}
app.kubernetes.io/name: halfserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "halfserve.labels" -}}
{{ include "halfserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "halfserve.metadata" -}}
name: {{ include "halfserve.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "halfserve.labels" . | nindent 2 }}
{{- end }}

{{/* The average number of requests in progress, queued or computed, over all replicas: the seconds that requests spent in
     the servers, for each second (Little's law). Both autoscalers read this figure. */}}
{{- define "halfserve.inProgress" -}}
sum(rate(halfserve_request_stage_seconds_sum{job="{{ .Release.Namespace }}/{{ include "halfserve.name" . }}",stage="total"}[30s]))
{{- end }}

{{- define "halfserve.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
{{- end }}

{{/* Values that contradict each other, which the schema cannot see: one line each. */}}
{{- define "halfserve.check" -}}
{{- $v := .Values -}}
{{- if and $v.models.persistentVolumeClaim $v.models.url }}
{{- fail "models.persistentVolumeClaim and models.url are both set, expected one: a server has one model repository" }}
{{- end }}
{{- if not (or $v.models.persistentVolumeClaim $v.models.url) }}
{{- fail "models.persistentVolumeClaim and models.url are both empty, expected one: --set models.persistentVolumeClaim=NAME or --set models.url=s3://BUCKET/FOLDER" }}
{{- end }}
{{- if not (or $v.gpu.count (dig "limits" "cpu" "" $v.resources)) }}
{{- fail "resources.limits.cpu is not set, expected a number of cores: without it the server starts a thread for each core of the node" }}
{{- end }}
{{- $own := "host grpc-port http-port metrics-port no-http model-control keep-going supervise lame-duck-seconds drain-seconds require-gpu cpu token-file tls-cert tls-key tls-client-ca" }}
{{- range $v.server.args }}
{{- if has (trimPrefix "--" (splitList "=" . | first)) (splitList " " $own) }}
{{- fail (printf "server.args has %s, which the chart sets from its other values, expected other options of `halfserve serve`" (splitList "=" . | first)) }}
{{- end }}
{{- end }}
{{- if and (eq (toString $v.rollout.maxSurge) "0") (eq (toString $v.rollout.maxUnavailable) "0") }}
{{- fail "rollout.maxSurge and rollout.maxUnavailable are both 0, expected one of them above: no replica could be replaced" }}
{{- end }}
{{- if and $v.tls.clientCertificates (not $v.tls.secret) }}
{{- fail "tls.clientCertificates is set without tls.secret, expected both: the Secret holds the authorities (ca.crt)" }}
{{- end }}
{{- if and $v.tokens.secret $v.podMonitor.enabled (not (or $v.podMonitor.endpoint.authorization $v.podMonitor.endpoint.basicAuth)) }}
{{- fail "tokens.secret is set, so Prometheus needs a token with the role metrics, expected podMonitor.endpoint.authorization.credentials: {name: SECRET, key: KEY}" }}
{{- end }}
{{- if and $v.tls.secret $v.podMonitor.enabled (not $v.podMonitor.endpoint.tlsConfig) }}
{{- fail "tls.secret is set, so Prometheus has to know whom it trusts, expected podMonitor.endpoint.tlsConfig: {ca: {secret: {name: SECRET, key: ca.crt}}, serverName: NAME}" }}
{{- end }}
{{- if and $v.alerts (not $v.podMonitor.enabled) }}
{{- fail "alerts is set without podMonitor.enabled, expected both: the rules need the metrics" }}
{{- end }}
{{- if ne $v.autoscaling.kind "none" }}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) }}
{{- fail (printf "autoscaling.minReplicas is %d and maxReplicas %d, expected minReplicas <= maxReplicas" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) }}
{{- end }}
{{- if not $v.podMonitor.enabled }}
{{- fail (printf "autoscaling.kind is %s without podMonitor.enabled, expected both: it scales on what Prometheus reads" $v.autoscaling.kind) }}
{{- end }}
{{- end }}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.prometheus) }}
{{- fail "autoscaling.kind is keda without autoscaling.prometheus, expected its address, such as http://prometheus-operated.monitoring:9090" }}
{{- end }}
{{- if and $v.kserve.enabled $v.models.secret }}
{{- fail "models.secret is set with kserve.enabled, expected serviceAccount: KServe copies the models with the credentials of a service account" }}
{{- end }}
{{- if and $v.kserve.enabled (eq $v.autoscaling.kind "hpa") }}
{{- fail "autoscaling.kind is hpa with kserve.enabled, expected keda or none: KServe makes the autoscaler, and its HPA knows CPU and memory alone" }}
{{- end }}
{{- end }}
