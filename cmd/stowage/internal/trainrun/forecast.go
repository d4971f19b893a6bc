// This file owns what is said of a run, or of a comparison, without training: the
// trainer's own code is walked on devices that compute nothing.

package trainrun

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/train"
)

// Outlook is the forecast of a run.
type Outlook struct {
	Model  string        `json:"model"`
	Policy string        `json:"policy"`
	Device int64         `json:"peak_device_bytes"` // of the fullest rank
	Host   int64         `json:"peak_host_bytes"`
	Budget int64         `json:"budget_bytes,omitempty"`
	Ranks  []RankOutlook `json:"ranks"`
}

// RankOutlook is one rank's part.
type RankOutlook struct {
	Rank     int              `json:"rank"`
	Stage    int              `json:"stage"`
	Replica  int              `json:"replica"`
	Device   int64            `json:"peak_device_bytes"`
	Host     int64            `json:"peak_host_bytes"`
	Owners   []Owner          `json:"owners"` // the order is that of device bytes
	Decision *policy.Decision `json:"decision,omitempty"`
}

// Owner is whose memory it is.
type Owner struct {
	Owner  string `json:"owner"`
	Device int64  `json:"device_bytes"`
	Host   int64  `json:"host_bytes"`
}

// OutlookRow is the forecast of a policy.
type OutlookRow struct {
	Policy string `json:"policy"`
	Device int64  `json:"peak_device_bytes"` // of the fullest rank
	Host   int64  `json:"peak_host_bytes"`
	Budget int64  `json:"budget_bytes,omitempty"`
}

// space is the addresses that the devices of a forecast share out, of each kind of memory. A
// process has 2^47 on common machines; activations reserve all of a device's, two pools of
// sharded parameters as much each, and pages of rows some besides. Of 64 ranks each has
// 512 GiB of device memory and 256 GiB of the host's, half of it if parameters are
// sharded; of fewer each has more.
var space = [device.Kinds]device.Bytes{device.Accel: 1 << 45, device.Host: 1 << 44}

// foresee walks a run, whatever device it is for, on CPU devices that nothing but their
// addresses limits: nobody touches them.
func foresee(cfg train.Config) (train.Outlook, error) {
	each, parts := space, device.Bytes(cfg.Layout.Ranks())
	if cfg.Sharding != nil {
		parts *= 2
	}
	for k := range each {
		each[k] /= parts
	}
	cfg.Device = func(int) (device.Device, error) {
		d, err := cpu.Open(cpu.Options{Capacity: each})
		if err != nil {
			return nil, err // and not a nil pointer as a device
		}
		return d, nil
	}
	f, err := train.Forecast(cfg)
	switch {
	case err == nil:
		return f, nil
	case cfg.Memory.Budget > 0:
		if err := refused(err, cfg.Memory.Budget); isWrong(err) {
			return f, err
		}
	}
	return f, blame(err)
}

// Forecast says what the run would take.
func (j *Job) Forecast() (o Outlook, err error) {
	f, err := foresee(j.config)
	if err != nil {
		return o, err
	}
	o.Model, o.Policy, o.Budget = j.config.Model.Name, j.Options.Policy, int64(j.config.Memory.Budget)
	o.Device, o.Host = most(f)
	for _, r := range f.Ranks {
		o.Ranks = append(o.Ranks, RankOutlook{
			Rank: r.Rank, Stage: r.Stage, Replica: r.Replica, Device: int64(r.Device), Host: int64(r.Host), Owners: owners(r), Decision: r.Decision,
		})
	}
	return o, nil
}

// most is what the fullest ranks take, of each kind of memory.
func most(f train.Outlook) (dev, host int64) {
	for _, r := range f.Ranks {
		dev, host = max(dev, int64(r.Device)), max(host, int64(r.Host))
	}
	return dev, host
}

// owners puts both kinds of memory of an owner into a line. Pools have their rank in their
// names, which is said already.
func owners(r train.RankOutlook) (out []Owner) {
	for _, u := range r.Owners {
		name := strings.TrimPrefix(u.Owner, fmt.Sprintf("rank %d ", r.Rank))
		i := slices.IndexFunc(out, func(o Owner) bool { return o.Owner == name })
		if i < 0 {
			i, out = len(out), append(out, Owner{Owner: name})
		}
		if u.Kind == device.Accel {
			out[i].Device = int64(u.Peak)
		} else {
			out[i].Host = int64(u.Peak)
		}
	}
	return out
}

// ForecastAll says what every policy would take. The budget is a share of what the first
// would, as in a comparison.
func (j *Job) ForecastAll() (rows []OutlookRow, err error) {
	budgets := []device.Bytes{0}
	for _, name := range train.Policies {
		tries := []device.Bytes{0}
		if name == "budget" {
			tries = budgets
		}
		var f train.Outlook
		var limit device.Bytes
		for _, limit = range tries {
			cfg := j.config
			if cfg.Memory, err = train.Named(name, limit); err != nil {
				return nil, err
			}
			if f, err = foresee(cfg); err == nil || !isWrong(err) {
				break
			}
		}
		if err != nil {
			return nil, fmt.Errorf("policy %s: %w", name, err)
		}
		if name == "none" {
			var ranks []heldBy
			for _, r := range f.Ranks {
				ranks = append(ranks, heldBy{r.Device, r.Owners})
			}
			budgets = limits(j.share, ranks)
		}
		row := OutlookRow{Policy: name, Budget: int64(limit)}
		row.Device, row.Host = most(f)
		rows = append(rows, row)
	}
	return rows, nil
}

// layout is a run in words.
func (j *Job) layout() string {
	o := j.Options
	return fmt.Sprintf("pp %d x vpp %d x dp %d (ep %d)", o.PP, o.VPP, o.DP, o.EP)
}

// OutlookTable shows what policies would take.
func (j *Job) OutlookTable(w io.Writer, rows []OutlookRow) {
	fmt.Fprintf(w, "%s on %s, steps of %d tokens: forecast\n\n", j.config.Model.Name, j.layout(), j.config.Tokens())
	fmt.Fprintf(w, "%-18s %12s %12s\n", "policy", "peak device", "peak host")
	for _, r := range rows {
		fmt.Fprintf(w, "%-18s %12s %12s\n", r.Policy, page.Size(r.Device), page.Size(r.Host))
	}
	var as []Row
	for _, r := range rows {
		as = append(as, Row{Policy: r.Policy, Device: r.Device})
	}
	fmt.Fprintf(w, "\n%s\n", wrap("Nothing was trained; peaks are those of the fullest rank: "+saves(as)+".", lineWidth))
}

// Text shows what a run would take: ranks that are alike together.
func (j *Job) Text(w io.Writer, f Outlook) {
	fmt.Fprintf(w, "%s under %s on %s, steps of %d tokens: forecast\n", f.Model, f.Policy, j.layout(), j.config.Tokens())
	var texts []string
	alike := map[string][]RankOutlook{}
	for _, r := range f.Ranks {
		text := rankText(r, f.Budget > 0)
		if alike[text] == nil {
			texts = append(texts, text)
		}
		alike[text] = append(alike[text], r)
	}
	for _, text := range texts {
		var ranks, stages []int
		for _, r := range alike[text] {
			ranks, stages = append(ranks, r.Rank), append(stages, r.Stage)
		}
		fmt.Fprintf(w, "\n%s (%s)\n%s", several("rank", ranks), several("stage", slices.Compact(stages)), text)
	}
	said := fmt.Sprintf("Nothing was trained. A rank takes at most %s of device and %s of host memory.", page.Size(f.Device), page.Size(f.Host))
	if f.Budget > 0 {
		said += " Times are assumed; the run measures them, and may decide otherwise within the same budget."
	}
	fmt.Fprintf(w, "\n%s\n", wrap(said, lineWidth))
}

// several names things by their numbers.
func several(what string, numbers []int) string {
	if len(numbers) == 1 {
		return fmt.Sprintf("%s %d", what, numbers[0])
	}
	return what + "s " + strings.Trim(strings.ReplaceAll(fmt.Sprint(numbers), " ", ", "), "[]")
}

// little is the share of a rank's memory below which owners are shown together.
const little = 1000

// rankText is a rank's table by owner, and under a budget what was decided.
func rankText(r RankOutlook, decided bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %-28s %12s %12s\n", "owner", "device", "host")
	line := func(o Owner) {
		fmt.Fprintf(&b, "  %-28s %12s %12s\n", o.Owner, page.Size(o.Device), page.Size(o.Host))
	}
	others := Owner{Owner: "others"}
	for _, o := range r.Owners {
		if o.Device <= r.Device/little && o.Host <= r.Host/little {
			others.Device, others.Host = others.Device+o.Device, others.Host+o.Host
			continue
		}
		line(o)
	}
	line(others)
	line(Owner{"at most together", r.Device, r.Host})
	if d := r.Decision; decided && d != nil {
		// A runtime has what parameters leave, and knows its stage.
		text := strings.Replace(d.Text(), fmt.Sprintf("rank %d: ", d.Rank), "beside parameters: ", 1)
		b.WriteString("\n  " + strings.TrimSpace(strings.ReplaceAll(text, "\n", "\n  ")) + "\n")
	}
	return b.String()
}
