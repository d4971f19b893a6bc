// This file owns the files of a run's folder, as far as those who write them and the
// report must agree:
//
//	config.yaml         the options
//	environment.json    the machine, the command and when it began
//	metrics.jsonl       one line a step
//	summary.json        what the run came to, and by rank what was chosen and why
//	trace/rank-N.trace  what rank N did; rank-N.K.trace after it was resumed K times
//	report.html         the page
//	trace.pftrace       the same traces for Perfetto
//
// A comparison has environment.json, report.html and trace.pftrace, and a folder with
// the others for each of its runs.

package report

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// Names of files in a run's folder.
const (
	ConfigFile      = "config.yaml"
	EnvironmentFile = "environment.json"
	MetricsFile     = "metrics.jsonl"
	SummaryFile     = "summary.json"
	TraceFolder     = "trace"
	PageFile        = "report.html"
	PerfettoFile    = "trace.pftrace"
)

// Environment is environment.json.
type Environment struct {
	Command string            `json:"command"`
	Began   string            `json:"began"` // RFC 3339
	Machine map[string]string `json:"machine"`
	Runs    []string          `json:"runs,omitempty"` // the folders of a comparison, in order
}

// RankSummary is what summary.json says of a rank, under the key "by_rank".
type RankSummary struct {
	Rank      int      `json:"rank"`
	Device    int64    `json:"peak_device_bytes"`
	Host      int64    `json:"peak_host_bytes"`
	Predicted int64    `json:"predicted_device_bytes,omitempty"`
	Step      float64  `json:"predicted_step_ms,omitempty"` // as the policy was chosen
	Policy    []Choice `json:"policy"`
	Notes     []string `json:"notes,omitempty"`
	Figures   []Figure `json:"figures,omitempty"`
	Pools     []Pool   `json:"pools,omitempty"`
}

// TraceName is the name of a trace in a run's folder: of a rank, and of the part after
// so many resumptions.
func TraceName(rank, part int) string {
	if part == 0 {
		return filepath.Join(TraceFolder, fmt.Sprintf("rank-%d.trace", rank))
	}
	return filepath.Join(TraceFolder, fmt.Sprintf("rank-%d.%d.trace", rank, part))
}

var traceName = regexp.MustCompile(`^rank-(\d{1,6})(?:\.(\d{1,6}))?\.trace$`)

// TraceFile is a trace in a run's folder.
type TraceFile struct {
	Path       string
	Rank, Part int
}

// TraceFiles are the traces in a run's folder, by rank and part.
func TraceFiles(dir string) (out []TraceFile) {
	list, _ := os.ReadDir(filepath.Join(dir, TraceFolder)) // a folder that is not there has none
	for _, f := range list {
		m := traceName.FindStringSubmatch(f.Name())
		if m == nil {
			continue
		}
		x := TraceFile{Path: filepath.Join(dir, TraceFolder, f.Name())}
		x.Rank, _ = strconv.Atoi(m[1])
		x.Part, _ = strconv.Atoi(m[2]) // none is zero
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b TraceFile) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Part, b.Part))
	})
	return out
}
