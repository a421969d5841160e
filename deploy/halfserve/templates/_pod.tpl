{{/* What the server's container is, under a Deployment and under KServe alike. Takes root, name, and repository: where the
     container finds the models. */}}
{{- define "halfserve.container" -}}
{{- $v := .root.Values -}}
- name: {{ .name }}
  image: {{ printf "%s:%s" $v.image.repository $v.image.tag }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  args:
    - serve
    - {{ .repository | quote }}
    - --host=0.0.0.0
    - --grpc-port=8001
    - --http-port=8000
    - --metrics-port=8002
    - --model-control={{ $v.server.modelControl }}
    - --supervise
    - --lame-duck-seconds={{ $v.server.lameDuckSeconds }}
    - --drain-seconds={{ $v.server.drainSeconds }}
    {{- if $v.server.keepGoing }}
    - --keep-going
    {{- end }}
    {{- if $v.gpu.count }}
    - --require-gpu
    {{- end }}
    {{- if $v.tokens.secret }}
    - --token-file=/etc/halfserve/tokens/tokens
    {{- end }}
    {{- if $v.tls.secret }}
    - --tls-cert=/etc/halfserve/tls/tls.crt
    - --tls-key=/etc/halfserve/tls/tls.key
    {{- end }}
    {{- if $v.tls.clientCertificates }}
    - --tls-client-ca=/etc/halfserve/tls/ca.crt
    {{- end }}
    {{- range $v.server.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    # Where caches go: results of crash probes, copies of models from object storage, CUDA's compiled kernels.
    - { name: HOME, value: /tmp }
    {{- with $v.server.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $v.models.secret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  ports:
    - { name: http, containerPort: 8000, protocol: TCP }
    - { name: grpc, containerPort: 8001, protocol: TCP }
    - { name: metrics, containerPort: 8002, protocol: TCP }
  # The ports open once all models are loaded.
  startupProbe:
    {{- include "halfserve.probe" (dict "tls" $v.tls "state" "live") | nindent 4 }}
    periodSeconds: 2
    timeoutSeconds: 5
    failureThreshold: {{ div (add $v.server.startupSeconds 1) 2 }}
  readinessProbe:
    {{- include "halfserve.probe" (dict "tls" $v.tls "state" "ready") | nindent 4 }}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 2
  livenessProbe:
    {{- include "halfserve.probe" (dict "tls" $v.tls "state" "live") | nindent 4 }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- $limits := $v.resources.limits | default dict }}
    {{- if $v.gpu.count }}
    {{- $limits = merge (dict $v.gpu.resource $v.gpu.count) $limits }}
    {{- end }}
    {{- toYaml (merge (dict "limits" $limits) $v.resources) | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities: { drop: [ALL] }
    privileged: false
    readOnlyRootFilesystem: true
    runAsGroup: 10001
    runAsNonRoot: true
    runAsUser: 10001
    seccompProfile: { type: RuntimeDefault }
  volumeMounts:
    - { name: scratch, mountPath: /tmp }
    {{- if and $v.models.persistentVolumeClaim (not $v.kserve.enabled) }}
    - { name: models, mountPath: /models, readOnly: true }
    {{- end }}
    {{- if $v.tokens.secret }}
    - { name: tokens, mountPath: /etc/halfserve/tokens, readOnly: true }
    {{- end }}
    {{- if $v.tls.secret }}
    - { name: tls, mountPath: /etc/halfserve/tls, readOnly: true }
    {{- end }}
{{- end }}

{{/* The kubelet's gRPC probe speaks no TLS, and its HTTPS probe shows no certificate. */}}
{{- define "halfserve.probe" -}}
{{- if .tls.clientCertificates -}}
tcpSocket: { port: 8001 }
{{- else if .tls.secret -}}
httpGet: { path: /v2/health/{{ .state }}, port: 8000, scheme: HTTPS }
{{- else -}}
grpc: { port: 8001 }
{{- end }}
{{- end }}

{{- define "halfserve.volumes" -}}
{{- $v := .Values -}}
- name: scratch
  emptyDir:
    {{- with $v.scratch.medium }}
    medium: {{ . }}
    {{- end }}
    sizeLimit: {{ $v.scratch.size }}
{{- if and $v.models.persistentVolumeClaim (not $v.kserve.enabled) }}
- name: models
  persistentVolumeClaim: { claimName: {{ $v.models.persistentVolumeClaim }}, readOnly: true }
{{- end }}
{{- if $v.tokens.secret }}
- name: tokens
  secret: { secretName: {{ $v.tokens.secret }}, defaultMode: 0440 }
{{- end }}
{{- if $v.tls.secret }}
- name: tls
  secret: { secretName: {{ $v.tls.secret }}, defaultMode: 0440 }
{{- end }}
{{- end }}

{{/* What a pod has beside its container and volumes, in a Deployment and in an InferenceService. */}}
{{- define "halfserve.pod" -}}
{{- $v := .Values -}}
automountServiceAccountToken: false
# Otherwise a Service named halfserve would set variables such as HALFSERVE_PORT.
enableServiceLinks: false
securityContext:
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
{{- with $v.serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ add $v.server.lameDuckSeconds $v.server.drainSeconds 10 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "halfserve.selector" . | nindent 8 }}
{{- with $v.gpu.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $v.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := $v.tolerations }}
{{- if $v.gpu.count }}
{{- $tolerations = append $tolerations (dict "key" $v.gpu.resource "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
