// This file owns forecasts: the memory of a run or a comparison, found without training.
// The trainer's own code runs on devices that compute nothing.

package run

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train"
)

// Forecast is the memory that a run is expected to take.
type Forecast struct {
	Model  string         `json:"model"`
	Policy string         `json:"policy"`
	Device int64          `json:"peak_device_bytes"` // of the fullest rank
	Host   int64          `json:"peak_host_bytes"`
	Budget int64          `json:"budget_bytes,omitempty"`
	Kinds  []rankKind     `json:"kinds"` // one for each stage
	Ranks  []RankForecast `json:"ranks"` // each rank, or the first of each kind if there are more than 64
	// Notes are remarks on options that will have no effect, as in [Summary].
	Notes []error `json:"-"`
	job   *Job
}

// rankKind counts ranks that take the same memory.
type rankKind struct {
	Stage  int   `json:"stage"`
	First  int   `json:"first_rank"`
	Count  int   `json:"count"` // ranks from the first on
	Device int64 `json:"peak_device_bytes"`
	Host   int64 `json:"peak_host_bytes"`
}

// mostListed is the most ranks that a forecast lists one by one.
const mostListed = 64

// RankForecast is the part of one rank.
type RankForecast struct {
	Rank     int              `json:"rank"`
	Stage    int              `json:"stage"`
	Replica  int              `json:"replica"`
	Device   int64            `json:"peak_device_bytes"`
	Host     int64            `json:"peak_host_bytes"`
	Owners   []Owner          `json:"owners"` // those with the most device bytes first
	Decision *policy.Decision `json:"decision,omitempty"`
}

// Owner is the memory of one owner.
type Owner struct {
	Owner  string `json:"owner"`
	Device int64  `json:"device_bytes"`
	Host   int64  `json:"host_bytes"`
}

// Forecasts holds the forecasts of all policies of a comparison.
type Forecasts struct {
	Rows []ForecastRow
	job  *Job
}

// ForecastRow is the forecast of one policy.
type ForecastRow struct {
	Policy string `json:"policy"`
	Device int64  `json:"peak_device_bytes"` // of the fullest rank
	Host   int64  `json:"peak_host_bytes"`
	Budget int64  `json:"budget_bytes,omitempty"`
}

// space is the address space that the devices of a forecast share, of each kind of
// memory. A process has 2^47 bytes on common machines. Activations reserve all of a
// device's space, two pools of sharded parameters as much each, and pages of rows some
// more. One rank of each stage is opened: with 64 stages, each has 512 GiB of device memory
// and 256 GiB of host memory, and half of that if parameters are sharded.
var space = [memory.Kinds]memory.Bytes{memory.Device: 1 << 45, memory.Host: 1 << 44}

// spaceOf returns the part of one device.
func spaceOf(cfg train.Config) [memory.Kinds]memory.Bytes {
	each, parts := space, memory.Bytes(cfg.Layout.PP)
	if cfg.Sharding != nil {
		parts *= 2
	}
	for k := range each {
		each[k] /= parts
	}
	return each
}

// forecast runs the trainer's code on CPU devices whose memory nothing touches, so that
// only their address space limits them.
func forecast(cfg train.Config) (train.RunForecast, error) {
	each := spaceOf(cfg)
	cfg.Device = func(int) (device.Device, error) {
		d, err := cpu.Open(cpu.Options{Capacity: each})
		if err != nil {
			return nil, err // not a nil *cpu.Device in an interface
		}
		return d, nil
	}
	f, err := train.Forecast(cfg)
	switch {
	case err == nil:
		return f, nil
	case cfg.Memory.Budget > 0:
		err = checkBudget(err, cfg.Memory.Budget)
	}
	return f, beforeStart(err)
}

// mostVisits is the most visits of a microbatch to a layer in a step that is forecast. Each is
// recorded with its tensors, which takes a quarter of a MiB and some milliseconds.
const mostVisits = 1 << 14

// checkVisits returns an *InputError if a forecast would take minutes and many GiB.
func (j *Job) checkVisits() error {
	n, pp := j.config.Batch.Microbatches, j.config.Layout.PP
	most := max(1, mostVisits/len(j.config.Model.Layers)/pp) * pp // interleaved stages need whole rounds
	if n <= most {
		return nil
	}
	return refuse("Microbatches", fmt.Sprint(n), "makes a step longer than a forecast follows",
		fmt.Sprintf("forecast %d: once the pipeline is full, each further one adds the same few bytes to a peak", most))
}

// Forecast returns the memory that the run would take. It trains nothing and needs no
// GPU. It returns an *InputError if the budget is too small, or the step too long.
func (j *Job) Forecast() (*Forecast, error) {
	if err := j.checkVisits(); err != nil {
		return nil, err
	}
	f, err := forecast(j.config)
	if err != nil {
		return nil, err
	}
	o := &Forecast{job: j}
	o.Model, o.Policy, o.Budget = j.config.Model.Name, j.Options.Policy, int64(j.config.Memory.Budget)
	o.Device, o.Host = highest(f)
	var groups []string
	for _, r := range f.Ranks {
		dev, host := int64(r.Device), int64(r.Host)
		if r.Replica == 0 {
			o.Kinds = append(o.Kinds, rankKind{r.Stage, r.Rank, j.config.Layout.DP, dev, host})
		} else if len(f.Ranks) > mostListed {
			continue
		}
		o.Ranks = append(o.Ranks, RankForecast{
			Rank: r.Rank, Stage: r.Stage, Replica: r.Replica, Device: dev, Host: host, Owners: owners(r), Decision: r.Decision,
		})
		if r.Decision != nil {
			for _, u := range r.Decision.Forecast.Units {
				groups = append(groups, u.Name)
			}
		}
	}
	if len(groups) > 0 {
		o.Notes = j.withoutEffect(groups)
	}
	return o, nil
}

// highest returns the peaks of the fullest ranks, of each kind of memory.
func highest(f train.RunForecast) (dev, host int64) {
	for _, r := range f.Ranks {
		dev, host = max(dev, int64(r.Device)), max(host, int64(r.Host))
	}
	return dev, host
}

// owners puts both kinds of memory of an owner into one entry. It cuts the rank from the
// names of pools, because the entry is in the rank's list.
func owners(r train.RankForecast) (out []Owner) {
	for _, u := range r.Owners {
		name := strings.TrimPrefix(u.Owner, fmt.Sprintf("rank %d ", r.Rank))
		i := slices.IndexFunc(out, func(o Owner) bool { return o.Owner == name })
		if i < 0 {
			i, out = len(out), append(out, Owner{Owner: name})
		}
		if u.Kind == memory.Device {
			out[i].Device = int64(u.Peak)
		} else {
			out[i].Host = int64(u.Peak)
		}
	}
	return out
}

// ForecastAll returns the memory that every policy of a comparison would take. The budget
// is a share of what the first policy would take, as in [Job.Compare].
func (j *Job) ForecastAll() (*Forecasts, error) {
	if err := j.checkVisits(); err != nil {
		return nil, err
	}
	all := &Forecasts{job: j}
	budgets := []memory.Bytes{0}
	for _, name := range train.Policies {
		tries := []memory.Bytes{0}
		if name == "budget" {
			tries = budgets
		}
		var f train.RunForecast // of the last budget that was not refused
		limit, err := leastBudget(tries, func(limit memory.Bytes) error {
			cfg := j.config
			var err error
			if cfg.Memory, err = train.NamedMemory(name, limit); err != nil {
				return err
			}
			got, err := forecast(cfg)
			if err == nil {
				f = got
			}
			return err
		})
		if err != nil {
			return nil, &PolicyError{name, err}
		}
		if name == "none" {
			var ranks []heldBy
			for _, r := range f.Ranks {
				ranks = append(ranks, heldBy{r.Device, r.Owners})
			}
			budgets = budgetsToTry(j.share, ranks)
		}
		row := ForecastRow{Policy: name, Budget: int64(limit)}
		row.Device, row.Host = highest(f)
		all.Rows = append(all.Rows, row)
		if j.OnForecast != nil {
			j.OnForecast(len(all.Rows), len(train.Policies))
		}
	}
	return all, nil
}

// layout returns the layout of the ranks in words.
func (j *Job) layout() string {
	o := j.Options
	return fmt.Sprintf("pp %d x vpp %d x dp %d (ep %d)", o.PP, o.VPP, o.DP, o.EP)
}

// WriteText prints the forecasts as a table for people.
func (f *Forecasts) WriteText(w io.Writer) {
	j, rows := f.job, f.Rows
	fmt.Fprintf(w, "%s on %s, steps of %d tokens: forecast\n\n", j.config.Model.Name, j.layout(), j.config.Tokens())
	fmt.Fprintf(w, "%-18s %12s %12s\n", "policy", "peak device", "peak host")
	for _, r := range rows {
		fmt.Fprintf(w, "%-18s %12s %12s\n", r.Policy, memory.Bytes(r.Device).Short(), memory.Bytes(r.Host).Short())
	}
	var as []Row
	for _, r := range rows {
		as = append(as, Row{Policy: r.Policy, Device: r.Device})
	}
	fmt.Fprintf(w, "\n%s\n", wrap("Nothing was trained; peaks are those of the fullest rank: "+savings(as)+".", lineWidth))
}

// mostShown is the most kinds of ranks that are shown by owner. If there are more, the
// fullest is.
const mostShown = 4

// WriteText prints the forecast for people. It shows ranks that are alike together.
func (f *Forecast) WriteText(w io.Writer) {
	j := f.job
	fmt.Fprintf(w, "%s under %s on %s, steps of %d tokens: forecast\n", f.Model, f.Policy, j.layout(), j.config.Tokens())
	var texts []string
	alike := map[string][]rankKind{}
	for _, k := range f.Kinds {
		i := slices.IndexFunc(f.Ranks, func(r RankForecast) bool { return r.Rank == k.First })
		text := rankText(f.Ranks[i], f.Budget > 0)
		if alike[text] == nil {
			texts = append(texts, text)
		}
		alike[text] = append(alike[text], k)
	}
	if len(texts) > mostShown {
		texts = []string{f.table(w, texts, alike)}
	}
	for _, text := range texts {
		fmt.Fprintf(w, "\n%s (%s)\n%s", numbered("rank", ranksOf(alike[text])), numbered("stage", stagesOf(alike[text])), text)
	}
	said := fmt.Sprintf("Nothing was trained. A rank takes at most %s of device and %s of host memory.", memory.Bytes(f.Device).Short(), memory.Bytes(f.Host).Short())
	if f.Budget > 0 {
		said += " Times are assumptions; the run measures them, and may choose differently within the same budget."
	}
	fmt.Fprintf(w, "\n%s\n", wrap(said, lineWidth))
}

// table prints a line for each kind of ranks, and returns the text of the fullest.
func (f *Forecast) table(w io.Writer, texts []string, alike map[string][]rankKind) (fullest string) {
	fmt.Fprintf(w, "\n  %-14s %-16s %6s %12s %12s\n", "stages", "ranks", "count", "device", "host")
	for _, text := range texts {
		k, n := alike[text], 0
		for _, x := range k {
			n += x.Count
		}
		fmt.Fprintf(w, "  %-14s %-16s %6d %12s %12s\n", ranges(stagesOf(k)), ranges(ranksOf(k)), n, memory.Bytes(k[0].Device).Short(), memory.Bytes(k[0].Host).Short())
		if fullest == "" || k[0].Device > alike[fullest][0].Device {
			fullest = text
		}
	}
	return fullest
}

func stagesOf(kinds []rankKind) (stages []int) {
	for _, k := range kinds {
		stages = append(stages, k.Stage)
	}
	return stages
}

func ranksOf(kinds []rankKind) (ranks []int) {
	for _, k := range kinds {
		for r := range k.Count {
			ranks = append(ranks, k.First+r)
		}
	}
	return ranks
}

// numbered names things by their numbers: "rank 1" or "ranks 1, 2".
func numbered(what string, numbers []int) string {
	if len(numbers) == 1 {
		return fmt.Sprintf("%s %d", what, numbers[0])
	}
	return what + "s " + ranges(numbers)
}

// ranges lists numbers that ascend. Of four and more in a row it gives both ends.
func ranges(numbers []int) string {
	var out []string
	for i := 0; i < len(numbers); {
		n := 1
		for i+n < len(numbers) && numbers[i+n] == numbers[i]+n {
			n++
		}
		if n > 3 {
			out = append(out, fmt.Sprintf("%d to %d", numbers[i], numbers[i+n-1]))
			i += n
			continue
		}
		out = append(out, fmt.Sprint(numbers[i]))
		i++
	}
	return strings.Join(out, ", ")
}

// littleShare divides a rank's memory into the amount below which owners are shown
// together.
const littleShare = 1000

// rankText returns the table of a rank by owner, and under a budget the decision.
func rankText(r RankForecast, decided bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %-28s %12s %12s\n", "owner", "device", "host")
	line := func(o Owner) {
		fmt.Fprintf(&b, "  %-28s %12s %12s\n", o.Owner, memory.Bytes(o.Device).Short(), memory.Bytes(o.Host).Short())
	}
	others := Owner{Owner: "others"}
	for _, o := range r.Owners {
		if o.Device <= r.Device/littleShare && o.Host <= r.Host/littleShare {
			others.Device, others.Host = others.Device+o.Device, others.Host+o.Host
			continue
		}
		line(o)
	}
	line(others)
	line(Owner{"at most together", r.Device, r.Host})
	if d := r.Decision; decided && d != nil {
		// The runtime decides over what parameters leave of the budget.
		text := strings.Replace(d.Text(), fmt.Sprintf("rank %d: ", d.Rank), "beside parameters: ", 1)
		b.WriteString("\n  " + strings.TrimSpace(strings.ReplaceAll(text, "\n", "\n  ")) + "\n")
	}
	return b.String()
}
